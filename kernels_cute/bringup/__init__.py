"""One small kernel per machine feature that the layer's kernels are made of.

Each uses the parts of the layer's kernels and as little else as it can, so that a rung that
fails points at one feature.
"""
