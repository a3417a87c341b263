"""What happens where files of tests are read, which every worker does with all of them."""


def test_no_file_compiles_where_it_is_read(compiled_while_reading):
    """One worker would do it, and the other wait."""
    assert compiled_while_reading == []
