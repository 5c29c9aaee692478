"""Node whose engine is another server: vLLM, SGLang, llama.cpp or any OpenAI server."""
