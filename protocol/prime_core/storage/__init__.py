"""Object storage: bytes under strict keys, most of them named by their SHA-256.

`base.ObjectStore` is the interface; `directory.DirectoryStore` is the embedded default and
`s3.S3Store` uses a bucket. tests/storage runs one suite on both.
"""
