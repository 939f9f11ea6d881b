"""Training programs of libraries, of tutorials and of well-known repositories, as steps."""
