"""`python -m protocol.broadcast …`"""

from protocol.broadcast.cli import main

if __name__ == "__main__":
    main()
