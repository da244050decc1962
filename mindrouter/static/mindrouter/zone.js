// Tells the server the viewer's time zone, for the pages that follow.
document.cookie =
  "mindrouter-zone=" +
  Intl.DateTimeFormat().resolvedOptions().timeZone +
  "; path=/; max-age=31536000; SameSite=Lax";
