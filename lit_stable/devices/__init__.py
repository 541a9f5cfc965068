"""Whether the devices of a machine do what they should, without a model or data."""
