"""What a run left in its folder, over REST, and the page that shows it."""
