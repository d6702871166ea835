"""Read checkpoint folders: configs, safetensors headers, the local hub cache."""
