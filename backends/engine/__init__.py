"""The engine every step-wise backend shares: batches, KV blocks, sampling; no device, no HTTP."""
