"""Signed HTTP between the programs: RFC 9421 signatures, RFC 9530 digests, RFC 9457 problems."""
