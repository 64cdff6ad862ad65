"""GGUF files, llama.cpp's format, read as the folder in Hugging Face layout that they were made from."""
