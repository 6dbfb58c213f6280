"""Torch's TCPStore, served and spoken without torch: workers meet there."""
