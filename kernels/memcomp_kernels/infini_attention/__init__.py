"""Infini-attention (arXiv 2404.07143): local attention and linear memory."""
