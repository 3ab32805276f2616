"""Load an artifact and run it; imports jax, numpy, safetensors, flatbuffers, tokenizers, click, jinja2 only."""
