"""What is wrong with a checkpoint of another library."""


class ConvertError(ValueError):
    """A checkpoint that is damaged, unsafe to read, or not of the layout that it should have."""
