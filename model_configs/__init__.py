"""The deployments that ship with mindstream: one yaml file each, see README.md."""
