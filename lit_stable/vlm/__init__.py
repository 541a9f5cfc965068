"""A frozen language model that learns to see: gated cross-attention between its layers, trained on images and texts.

Nothing outside of this folder and of `cli/systems.py` knows of it: the GPT, the data stream, the callbacks and the run
on disk are those of a text run.
"""
