"""Plug points of training frameworks, one module each. None is imported before it is used."""
