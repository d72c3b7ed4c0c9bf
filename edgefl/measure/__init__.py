"""Measures what a device takes for each class of operation: here, over ssh, and on phones without Python."""
