"""The endpoint picker."""
