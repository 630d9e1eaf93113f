"""The program that the options describe: its inputs and its split over devices, compiled and measured."""
