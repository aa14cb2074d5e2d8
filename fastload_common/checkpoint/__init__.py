"""What lies where in a model's safetensors files. Pure: takes bytes and names, does no I/O."""
