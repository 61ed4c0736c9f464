"""The dashboard in the browser: it reads run folders and starts runs as processes of their own."""
