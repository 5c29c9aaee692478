"""The /infill route, in the words of llama.cpp's server."""
