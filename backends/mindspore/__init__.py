"""The primary backend: MindFormers models in MindSpore graph mode."""
