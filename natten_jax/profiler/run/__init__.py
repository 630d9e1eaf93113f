"""The program that is measured."""
