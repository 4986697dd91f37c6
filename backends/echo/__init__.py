"""A backend that streams the prompt back: for demonstrations, tests and overhead measurements."""
