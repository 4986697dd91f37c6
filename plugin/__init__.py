"""The contract between server and backends, and the composition of both. Free of HTTP and of MindSpore."""
