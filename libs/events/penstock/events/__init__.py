"""Typed, frozen events, their envelope (CloudEvents 1.0), codec, upcasters and schemas."""
