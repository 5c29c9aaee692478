"""POST /infill: fill-in-the-middle in the format of llama.cpp's server."""
