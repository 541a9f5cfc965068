"""A frozen language model that learns to see: gated cross-attention between its layers, trained on images and texts.

Nothing outside of this folder knows of it but `systems.py`, by its name, and the command line. The GPT, the stream of
data, the callbacks and the run on disk are those of a text run.
"""
