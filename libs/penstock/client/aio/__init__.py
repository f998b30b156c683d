"""Asynchronous client of the gateway, over `httpx.AsyncClient`: the source of `penstock.client.sync`, which
`make client` generates from these files.

What differs between the two is in `penstock.client.waits_async` and `penstock.client.waits`.
"""
