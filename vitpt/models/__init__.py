"""Vision Transformer backbones in plain torch; parameter names are timm's."""
