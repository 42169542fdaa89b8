"""Graphs of real models, and the scripts that make them."""
