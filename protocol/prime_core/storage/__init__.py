"""Objects: bytes under strict keys, most of them named by their SHA-256.

`base.ObjectStore` is the port; `directory.DirectoryStore` the embedded default; `s3.S3Store` a
bucket. tests/storage runs one suite on both.
"""
