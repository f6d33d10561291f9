"""`python -m prime_broadcast …`"""

from prime_broadcast.cli import main

if __name__ == "__main__":
    main()
