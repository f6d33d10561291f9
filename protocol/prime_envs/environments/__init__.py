"""The built-in environments: each file defines the Environment whose name the file has."""
