"""What there is to do: the ladder, the blank book, exercises; and how a reader's chapters run in place of ours."""
