"""The kernel sandbox behind other libraries' interfaces."""
