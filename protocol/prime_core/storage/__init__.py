"""Objects: bytes under strict keys, most of them named by their SHA-256.

`base.ObjectStore` is the port; `directory.DirectoryStore` the embedded default. A store that
presigns its own URLs (S3) joins by implementing the port and passing tests/storage's suite.
"""
