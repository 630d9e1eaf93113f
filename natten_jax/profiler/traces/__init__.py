"""What ran on a device: traces captured and read, launches named, and their time put to passes of a program."""
