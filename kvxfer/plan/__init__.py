"""What moves between two engines that need not be there: from their geometry to routes, chunks,
staging and time, by the code that moves it.
"""
