"""`python -m prime_verify …`"""

from prime_verify.cli import main

main()
