"""Multimodal input: `items` parses a list, `load` fetches and decodes what it names.

The rest serves `load`: `sources` reads one address, `fetch` and `addresses` go to a media host,
`local` opens a file, `decode` looks at the content.
"""
