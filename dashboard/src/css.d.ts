// esbuild takes styles that are imported into app.css.
declare module '*.css';
