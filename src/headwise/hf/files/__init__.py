"""Reading of checkpoint folders: configs, safetensors headers and the local hub cache."""
