"""The course: the ladder, the blank book, the exercises, and the overlay that runs a reader's
chapters."""
