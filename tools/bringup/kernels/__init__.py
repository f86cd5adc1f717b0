"""One small kernel per machine feature that the layer's kernels are made of.

Each uses the layer's own parts (``mok.kernels_cute``) and as little else as it can, so that a rung that
fails points at one feature.
"""
