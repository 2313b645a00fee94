"""vitpt: pretrain Vision Transformers on your own images."""

__version__ = "0.1.0"
