"""Images beside text: what a request carries of them, and the rows that a stream begins with for them."""
