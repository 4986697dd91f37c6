"""The contract between server and backends, and the composition of both."""
