"""The course: the ladder, the blank book, the exercises, and an overlay for readers' chapters."""
