"""Reads and writes checkpoint folders: safetensors files, their headers and hashes, JSON within bounds."""
