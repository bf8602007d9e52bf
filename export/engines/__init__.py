"""Offline twins of the engines: what each will do with a checkpoint, from headers and configuration alone."""
