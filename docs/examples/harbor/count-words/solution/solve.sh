#!/bin/bash
python3 /solution/solve.py
